"""Views of a plan: summary, explanation, comparison, alternatives, JSON, report page."""

"""From an assignment to the statements of a layout."""

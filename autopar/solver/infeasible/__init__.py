"""Messages for problems without a plan."""

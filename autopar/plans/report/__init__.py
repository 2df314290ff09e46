"""A plan as one page to look at: `contents` gathers what it shows, `page` lays it out."""

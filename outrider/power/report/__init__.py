"""What a profile found: its trace, figures, and the page that shows them."""

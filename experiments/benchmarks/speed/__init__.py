"""Speed beside peers, see README.md here."""

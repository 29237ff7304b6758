"""Text: finding and splitting files, tokenising them, and packing tokens into sequences."""

"""Model families, as one decoder and what differs."""

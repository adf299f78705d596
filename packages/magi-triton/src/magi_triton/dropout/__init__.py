"""The dropout mask of attention: one Philox draw per (batch, head, query, key)."""

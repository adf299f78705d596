"""One file per subject; each registers its cases when imported."""

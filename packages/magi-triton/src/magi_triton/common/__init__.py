"""What the operators share: checks of arguments, launch helpers, small device functions."""

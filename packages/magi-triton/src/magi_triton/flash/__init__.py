"""Dense and packed softmax attention, forward and backward."""

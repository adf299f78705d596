"""Dense attention with the keys split over programs."""

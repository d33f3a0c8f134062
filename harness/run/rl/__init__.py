"""The RL loop: what is generated trains, new weights go back, and policies steer the generation."""

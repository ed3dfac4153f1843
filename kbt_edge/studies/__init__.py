"""The studies: the cart-pole of the paper with its baselines, the token study, and the demo."""

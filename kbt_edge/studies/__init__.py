"""The studies: the cart-pole of the paper with its baselines, and what is made of them."""

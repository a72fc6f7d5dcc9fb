"""What a training's state is: parameters, optimizers, and what the host holds."""

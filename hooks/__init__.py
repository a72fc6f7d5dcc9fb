"""Hooks into training frameworks: they tell jitckpt where in a minibatch the training is."""

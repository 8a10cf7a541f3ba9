"""A checkpoint or a trained model as one ordinary Keras file."""

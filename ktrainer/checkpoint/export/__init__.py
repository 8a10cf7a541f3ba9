"""A checkpoint or a trained model as one ordinary Keras file.

keras_file.py    saves the model of a run, gathered from all of its stages
export_model.py  converts a checkpoint, without the script that trained it
"""

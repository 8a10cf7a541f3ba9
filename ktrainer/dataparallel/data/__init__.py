"""The names of `horovod.tensorflow.data`: `ktrainer.dataparallel.data.compute_service`."""

"""The names of `horovod.tensorflow.data.compute_service`: a tf.data service for training scripts.

    from ktrainer.dataparallel.data.compute_service import TfDataServiceConfig

    config = TfDataServiceConfig.read(path, wait_for_file_creation=True)
    dataset = dataset.send_to_data_service(config, hvd.rank(), hvd.size())

As under Horovod, the import gives every `tf.data.Dataset` the method `send_to_data_service`.
"""

from __future__ import annotations

import tensorflow as tf

from ktrainer.data import TfDataServiceConfig, send_to_data_service
from ktrainer.data import data_service as tf_data_service

tf.data.Dataset.send_to_data_service = send_to_data_service

__all__ = ["TfDataServiceConfig", "send_to_data_service", "tf_data_service"]

"""The private symbols of Keras and TensorFlow that the package replaces, calls or reads.

Keras 3 has no interface for a distribution that is not its own. CONTRIBUTING.md says how
to support another version of it. At start `symbol_check` compares the table with what is installed.

The table has a module, then one of its symbols with the parameters that we rely on, then the
packages that use it and why. `Class()._name` is an attribute that an instance gets in code of the
class; `function()._name` is a name in code of the function. A symbol behind `?` may be missing.
Public functions are listed where they are replaced.
"""

from __future__ import annotations

SUPPORTED = {"keras": ">=3.14,<3.16", "tensorflow": "~=2.21.0"}

TABLE = """
keras.src.losses.loss
    reduce_weighted_values(values, sample_weight, mask, reduction, dtype)
        steps: replaced; each loss is divided by its denominator over all ranks
    apply_mask(sample_weight, mask, dtype, reduction)
        steps: called; the weights of a masked loss
    squeeze_or_expand_to_same_rank(x1, x2, expand_rank_1)
        steps: called; the weights of a loss
    scale_loss_for_distribution(value)
        tf_distribute: replaced; losses have their denominators already
    unscale_loss_for_distribution(value)
        tf_distribute: replaced; losses have their denominators already
keras.src.trainers.trainer
    Trainer.compile
        script: replaced; a compiled model is cut into stages again
    Trainer.compute_loss(self, x, y, y_pred, sample_weight, training)
        steps: replaced; trainer.loss_scope=global gathers the rows of all ranks
    Trainer._compute_loss(self, x, y, y_pred, sample_weight, training)
        pipeline: called; the loss of the last stage
    Trainer._assert_compile_called(self, method_name)
        script: called; Keras' own error for a model that is not compiled
    Trainer._resolve_auto_jit_compile(self)
        dataparallel: replaced; XLA cannot communicate
    Trainer._flatten_metrics_in_order(self, logs)
        script, trainer: called; the order of the values that `evaluate` returns
    Trainer()._compile_loss
        steps, pipeline, verify, checkpoint: read; a model that is compiled again gets a new program
    Trainer()._compile_config
        steps: read; a model that is compiled again gets a new program
    Trainer()._compile_metrics
        steps, pipeline, verify, checkpoint: read; a model compiled again gets a new program
    Trainer()._loss_tracker
        steps, pipeline, checkpoint: read; the metric that counts the loss
    Trainer()._initial_epoch
        training: read, set; the epoch where BackupAndRestore continues
keras.src.backend.tensorflow.trainer
    TensorFlowTrainer._aggregate_additional_loss(self, loss)
        steps: replaced; a vector given to `add_loss` is summed over all ranks
    TensorFlowTrainer()._distribute_strategy
        steps: set; a model leaves its strategy
    TensorFlowTrainer.fit
        script: replaced; `ktrainer run` sends it through a Trainer
    TensorFlowTrainer.evaluate
        script: replaced; `ktrainer run` sends it through a Trainer
    TensorFlowTrainer.predict
        script: replaced; `ktrainer run` sends it through a Trainer
    TensorFlowTrainer.train_on_batch
        script: replaced; `ktrainer run` sends it through a Trainer
    TensorFlowTrainer.test_on_batch
        script: replaced; `ktrainer run` sends it through a Trainer
    TensorFlowTrainer.predict_on_batch
        script: replaced; `ktrainer run` sends it through a Trainer
keras.src.models.model
    Model.get_weights
        script: replaced; reads weights that other stages hold
    Model.save
        script: replaced; rank 0 writes
    Model.save_weights
        script: replaced; rank 0 writes
    Model.export
        script: replaced; rank 0 writes
    Model.load_weights
        script: replaced; loads into the variables that this rank holds
keras.src.metrics.metric
    Metric.update_state
        steps, tf_distribute: replaced on objects; the source of logs, outputs of all replicas
    Metric.result
        steps: replaced on objects; the source of logs
    Metric()._metrics, _variables
        steps: read; metrics inside of metrics
keras.src.metrics.accuracy_metrics
    Accuracy()._direction
        checkpoint: read; whether a higher or a lower value of a metric is better
keras.src.metrics.f_score_metrics
    FBetaScore()._built
        training: read; a metric without all of its variables has nothing to save yet
keras.src.metrics.reduction_metrics
    Mean.update_state(self, values, sample_weight)
        steps, pipeline: replaced; a scalar counts with the weight of the local batch
keras.src.layers.layer
    Layer.__call__
        verify, pipeline: replaced; ends a pass that takes too long; a call through stages
    Layer.trainable_variables
        pipeline: replaced; in a step of the model's own those that this stage holds
    Layer.trainable_weights
        pipeline: replaced; in a step of the model's own those that this stage holds
    Layer.symbolic_call(self, *args, **kwargs)
        pipeline: replaced; opens layers into the calls inside
    Layer.losses
        pipeline: replaced; added losses of all stages
    Layer.add_loss(self, loss)
        tf_distribute, pipeline: replaced; added losses are kept by replica, and by no opened layer
    Layer._get_own_losses(self)
        tf_distribute, pipeline: replaced, called; added losses are kept by replica
    Layer._clear_losses(self)
        tf_distribute, pipeline, verify: replaced, called; added losses are kept by replica
    Layer._get_regularization_losses(self)
        steps: replaced; penalties have no denominator to count
    Layer._flatten_layers(self, include_self, recursive)
        steps, training, pipeline, tf_distribute, verify, callbacks, data, modelparallel: called
    Layer._flatten_layers(self, include_self, recursive)
        checkpoint: called; layers with copies of their weights
    Layer._open_name_scope(self)
        pipeline: called; names of operations in a traced model
    Layer()._layers, _call_has_training_arg, _call_context_args, _loss_ids
        pipeline, tf_distribute: read; how a layer is called, and what is inside
    Layer()._seed_generators
        verify: read; the layers that draw random numbers
    Layer()._remat_mode
        pipeline: read; refused, as it hides weights from the gradient of a stage
    Layer()._called
        verify: read; changes when a layer is called first, and is not restored
    Layer().current_call_ctx
        pipeline: key of the global state; several nodes are one call
    CallContext.__init__(self, entry_layer)
        pipeline: called; several nodes are one call
keras.src.layers.normalization.batch_normalization
    BatchNormalization._moments(self, inputs, mask)
        steps: replaced; synchronized statistics under a mask
    BatchNormalization()._reduction_axes
        steps: read; synchronized statistics under a mask
    BatchNormalization.call(self, inputs, training, mask)
        verify: replaced; frozen statistics
keras.src.layers.preprocessing.index_lookup
    IndexLookup().input_vocabulary, input_idf_weights, idf_weights_const
        checkpoint: set, read; the description of a model has the vocabulary of `adapt`
keras.src.models.functional
    Functional.call(self, inputs, training, mask, **kwargs)
        pipeline: compared; whether a model has a call of its own
keras.src.models.sequential
    Sequential()._functional
        pipeline: read; the functional graph inside
keras.src.ops.function
    Function.__init__(self, inputs, outputs, name)
        pipeline: called; the graph of a traced model
    Function()._inputs_struct, _nodes_by_depth
        pipeline: read; the graph of a functional model
keras.src.ops.node
    Node.__init__(self, operation, call_args, call_kwargs, outputs)
        pipeline: replaced; records calls on symbolic tensors
    Node()._keras_history
        pipeline: removed; nodes of the trace are forgotten
keras.src.ops.operation
    Operation.__new__(cls, *args, **kwargs)
        pipeline: replaced; records operations that are created
    Operation()._inbound_nodes, _outbound_nodes
        pipeline: changed; nodes of the trace are forgotten
    Operation()._inbound_nodes, _outbound_nodes
        verify: which layer comes before a batch normalization
keras.src.utils.traceback_utils
    inject_argument_info_in_traceback()._keras_call_info_injected
        steps, pipeline: set; an error of ours blames no layer
keras.src.utils.naming
    to_snake_case(name)
        pipeline, steps: called; names of layers
keras.src.backend
    get_keras_mask(x)
        steps, pipeline: called; masks travel with tensors
    set_keras_mask(x, mask)
        steps, pipeline: called; masks travel with tensors
    get_autocast_scope()
        pipeline: called; precision of operations outside of layers
    AutocastScope.__init__(self, dtype)
        pipeline: called; precision of operations outside of layers
    standardize_dtype(dtype)
        pipeline: called; names of types
    compute_output_spec(fn, *args, **kwargs)
        pipeline: called; shapes of the outputs of a stage
keras.src.backend.config
    is_flash_attention_enabled().flash_attention
        tf_distribute: key of the global state; threads of replicas have the same settings
keras.src.dtype_policies.dtype_policy
    set_dtype_policy().dtype_policy
        tf_distribute: key of the global state; threads of replicas have the same settings
keras.src.backend.common.global_state
    get_global_attribute(name, default, set_to_default)
        steps, pipeline, tf_distribute, checkpoint: called; scopes and seeds of a thread
    set_global_attribute(name, value)
        pipeline, tf_distribute: called; scopes and seeds of a thread
    GLOBAL_STATE_TRACKER
        modelparallel: read; threads of a step's body have the state of the one that calls it
keras.src.backend.common.stateless_scope
    StatelessScope().stateless_scope
        pipeline, tf_distribute: key of the global state; leaving the scope for a while
    in_stateless_scope()
        steps: called; a function that is compiled by itself cannot assign in one
keras.src.backend.common.symbolic_scope
    in_symbolic_scope()
        steps: called; Keras infers shapes
keras.src.backend.common.variables
    Variable.__init__
        pipeline: replaced; variables of other stages get no values
    Variable()._value, _initializer, _trainable, _dtype
        steps, pipeline, tf_distribute, verify: changed; variables move, or have no values
    register_uninitialized_variable().uninitialized_variables
        steps, pipeline: key of the global state; variables of other stages get no values
keras.src.backend.tensorflow.core
    Variable.assign(self, value)
        pipeline: replaced; layers that assign are not opened
    Variable._direct_assign(self, value)
        steps, verify: replaced, called; the statistics that a step assigns
    Variable.assign_add(self, value)
        tf_distribute: replaced; replicas and workers add without a race
    Variable.assign_sub(self, value)
        tf_distribute: replaced; replicas and workers subtract without a race
    Variable._initialize(self, value)
        steps: called; variables move
    Variable._deferred_initialize(self)
        pipeline: called; variables of this stage get values
keras.src.backend.tensorflow.nn
    _compute_moments_sync(x, axes, keepdims)
        steps: replaced; synchronized statistics over all ranks
keras.src.backend.tensorflow.optimizer
    TFOptimizer._var_key(self, variable)
        steps, pipeline: replaced, called; variables without values
    TFOptimizer.add_variable_from_reference(self, reference_variable, name, initializer)
        pipeline: replaced; the weight that a slot belongs to
    TFOptimizer._distributed_tf_update_step(self, distribution, grads_and_vars, learning_rate)
        tf_distribute: replaced; sharded variables
    TFOptimizer._apply_weight_decay(self, variables)
        tf_distribute: replaced; sharded variables
    TFOptimizer._overwrite_model_variables_with_average_value(self, trainable_variables)
        tf_distribute: replaced; sharded variables
    TFOptimizer()._distribution_strategy
        steps: changed; optimizers follow variables into a strategy
keras.src.optimizers.base_optimizer
    global_norm(value_list)
        pipeline: replaced; over all stages
    BaseOptimizer.apply(self, grads, trainable_variables)
        steps, script, dataparallel, training: replaced; gradients are reduced first, then clipped
    BaseOptimizer.apply_gradients(self, grads_and_vars)
        script: replaced; refused in a loop of the script's own
    BaseOptimizer._backend_apply_gradients(self, grads, trainable_variables)
        pipeline: replaced; the variables that have gradients
    BaseOptimizer._backend_apply_gradients(self, grads, trainable_variables)
        verify: looked up; an optimizer of a user's own that is given all gradients
    BaseOptimizer.add_variable_from_reference(self, reference_variable, name, initializer)
        pipeline: called; the weight that a slot belongs to
    BaseOptimizer._get_current_learning_rate(self)
        callbacks: replaced on objects; a factor for each step
    BaseOptimizer._use_weight_decay(self, variable)
        tf_distribute: called; sharded variables
    BaseOptimizer()._trainable_variables
        steps, pipeline, script, checkpoint, elastic, dataparallel: read; the slots of each variable
    BaseOptimizer()._trainable_variables_indices, _exclude_from_weight_decay
        steps, pipeline, script: changed; variables move, or have no values
    BaseOptimizer()._exclude_from_weight_decay_cache
        steps: changed; variables move
    BaseOptimizer()._learning_rate
        steps, pipeline, callbacks, dataparallel: read; a schedule, or a variable
    BaseOptimizer()._iterations
        steps, pipeline, callbacks, tuning, training, checkpoint: read, an import sets it; updates
    BaseOptimizer()._variables
        pipeline: read; the variables that are no slots
    BaseOptimizer()._model_variables_moving_average
        tf_distribute, pipeline: read; averages of sharded variables, and of stages
keras.src.optimizers.loss_scale_optimizer
    LossScaleOptimizer.apply(self, grads, trainable_variables)
        steps, dataparallel: replaced; gradients are reduced first of all
    LossScaleOptimizer.check_finite(self, grads)
        pipeline: replaced; over all stages
    LossScaleOptimizer._tf_apply(self, grads, trainable_variables)
        tf_distribute: replaced; one replica updates for all
    LossScaleOptimizer._common_apply(self, grads, trainable_variables)
        tf_distribute: called; one replica updates for all
keras.src.optimizers.rmsprop
    RMSprop()._momentums
        callbacks: read; slots that hold past steps times their learning rate
keras.src.optimizers.multi_optimizer
    ?MultiOptimizer()._inner_optimizers, _var_to_optimizer_idx
        steps: changed; optimizers follow variables into a strategy
keras.src.random.seed_generator
    SeedGenerator.next(self, ordered)
        steps: replaced; ranks draw different numbers from equal states
    global_seed_generator()
        steps, checkpoint: called; the state of functions without a seed
    GLOBAL_SEED_GENERATOR
        pipeline, tf_distribute, checkpoint: read; its key in the global state
keras.src.backend.tensorflow.random
    normal(shape, mean, stddev, dtype, seed)
        steps, verify: replaced; draws that do not depend on the batch
    uniform(shape, minval, maxval, dtype, seed)
        steps, verify: replaced; draws that do not depend on the batch
    truncated_normal(shape, mean, stddev, dtype, seed)
        steps, verify: replaced; draws that do not depend on the batch
    categorical(logits, num_samples, dtype, seed)
        steps, verify: replaced; draws that do not depend on the batch
    randint(shape, minval, maxval, dtype, seed)
        steps, verify: replaced; draws that do not depend on the batch
    dropout(inputs, rate, noise_shape, seed)
        steps, verify: replaced; draws that do not depend on the batch
    shuffle(x, axis, seed)
        steps, verify: replaced; draws that do not depend on the batch
    gamma(shape, alpha, dtype, seed)
        steps, verify: replaced; draws that do not depend on the batch
    binomial(shape, counts, probabilities, dtype, seed)
        steps, verify: replaced; draws that do not depend on the batch
    beta(shape, alpha, beta, dtype, seed)
        steps, verify: replaced; draws that do not depend on the batch
    _get_concrete_noise_shape(inputs, noise_shape)
        verify: called; the shape of dropout's draws
keras.src.trainers.data_adapters.array_slicing
    TensorflowSparseWrapper
        data: read; sparse arrays
    can_slice_array(x)
        data: called; the kinds of arrays that Keras takes
    convert_to_sliceable(arrays, target_backend)
        data: called; the types that Keras gives to a model
    slice_tensorflow_sparse_wrapper(sparse_wrapper, indices)
        data: called; sparse arrays
    train_validation_split(arrays, validation_split)
        data: called; the examples of validation_split
keras.src.trainers.data_adapters.array_data_adapter
    ArrayDataAdapter.__init__(self, x, y, sample_weight, batch_size, steps, shuffle, class_weight)
        data: called; the order of shuffled examples
    ArrayDataAdapter.get_tf_dataset(self)
        data: called; the order of shuffled examples
keras.src.trainers.data_adapters.tf_dataset_adapter
    make_class_weight_map_fn(class_weight)
        data: called; class weights of a tf.data.Dataset
keras.src.trainers.data_adapters.data_adapter_utils
    class_weight_to_sample_weights(y, class_weight)
        script: called; class weights of train_on_batch
    is_scipy_sparse(x)
        data: called; sparse batches of SciPy
    scipy_sparse_to_tf_sparse(x)
        data: called; sparse batches of SciPy
keras.src.callbacks.callback_list
    CallbackList()._async_train, _async_test, _async_predict
        callbacks: set; events stay in the thread of the collectives
keras.src.utils.python_utils
    pythonify_logs(logs)
        callbacks: called; logs of a batch as Keras' own list gives them
keras.src.callbacks.model_checkpoint
    ModelCheckpoint._should_save_model(self, epoch, batch, logs, filepath)
        script, checkpoint: replaced on objects, called; rank 0 decides
    ModelCheckpoint._get_file_path(self, epoch, batch, logs)
        checkpoint: called; rank 0 names the file
    ModelCheckpoint()._batches_seen_since_last_saving, _last_batch_seen
        checkpoint: read and restored; the state of the callback
keras.src.callbacks.orbax_checkpoint
    OrbaxCheckpoint()._batches_seen_since_last_saving, _last_batch_seen, _total_batches_seen
        checkpoint: read and restored; the state of the callback
keras.src.callbacks.swap_ema_weights
    SwapEMAWeights._swap_variables(self)
        pipeline, callbacks: replaced, called; each stage swaps its own; a rollback swaps back
    SwapEMAWeights._finalize_ema_values(self)
        pipeline, callbacks: replaced, called; as above; averages where `max_steps` ends training
    SwapEMAWeights()._ema_weights_in_model
        checkpoint, callbacks: read and restored; the state of the callback
keras.src.callbacks.tensorboard
    TensorBoard()._global_train_batch, _global_test_batch
        checkpoint: read and restored; the state of the callback
tensorflow.python.checkpoint.checkpoint
    Checkpoint.save(self, file_prefix, options)
        script: replaced; rank 0 writes
    Checkpoint.write(self, file_prefix, options)
        script: replaced; rank 0 writes
tensorflow.python.checkpoint.checkpoint_management
    CheckpointManager.save
        script: replaced; rank 0 writes
    CheckpointManager()._latest_checkpoint
        script: read, set; other ranks know what rank 0 has written
    CheckpointManager()._maybe_delete
        script: read, set; likewise
    CheckpointManager()._last_preserved_timestamp
        script: read, set; likewise
tensorflow.python.eager.backprop
    GradientTape.gradient(self, target, sources, output_gradients, unconnected_gradients)
        steps, tf_distribute: replaced; a vector is summed over all ranks; sharded variables
tensorflow.python.eager.record
    could_possibly_record()
        dataparallel: called; whether another tape records the gradients of a tape
    record_operation(op_type, output_tensors, input_tensors, backward_function, forward_function)
        pipeline: called; the outputs of a cut model have their gradient, slices included
    stop_recording()
        pipeline: called; tensors that a tape does not know
    should_record_backprop(tensors)
        pipeline: called; whether a gradient of a model's inputs is asked for
tensorflow.python.framework.random_seed
    _graph_to_seed_dict
        steps: changed; stages of a pipeline draw different numbers by tf.random
tensorflow.python.eager.context
    context()
        steps, runtime, data, verify, tf_distribute: called; operations, seeds, the cluster
    global_seed()
        runtime, data: called; whether the script has set a seed
    Context()._rng
        runtime, verify: read; the generator of seeds
    Context.coordination_service
        tf_distribute: read; whether the cluster is connected
    Context.configure_coordination_service
        tf_distribute: called; a lost process is noticed
tensorflow.python.eager.execute
    execute(op_name, num_outputs, inputs, attrs, ctx, name)
        steps: called with _ReadVariablesOp; many variables are read in one operation
tensorflow.compiler.xla.tsl.protobuf.coordination_config_pb2
    CoordinatedJob
        tf_distribute: called; a lost process is noticed
tensorflow.python.ops.control_flow_util
    GraphOrParentsInXlaContext(graph)
        dataparallel: called; XLA cannot communicate
tensorflow.python.ops.control_flow_v2_func_graphs
    ControlFlowFuncGraph
        steps: called; losses in branches and loops, which some ranks compute
tensorflow.python.framework.ops
    get_default_graph()
        steps, dataparallel: called; the scope of a strategy in a compiled step; XLA
    EagerTensor._shape_tuple()
        data: called; an eager tensor's shape, without objects for it
    Graph._distribution_strategy_stack
        steps: changed; the scope of a strategy in a compiled step
    Graph._variable_creator_stack
        steps: changed; the scope of a strategy in a compiled step
    Graph._get_function(self, name)
        pipeline, steps: called; operations inside of functions
    Operation._add_control_inputs
        pipeline: called; the order of gradients
    Operation._set_attr(self, attr_name, attr_value)
        distributed: called; products that the optimizer does not merge; what XLA does not compile
    Operation._is_stateful
        steps: read; values that a log is computed from
    get_gradient_function()._gradient_op_type
        pipeline: read; custom gradients in a graph
tensorflow.python.framework.func_graph
    FuncGraph
        pipeline: called; shapes of losses
tensorflow.python.distribute.distribute_lib
    _DefaultDistributionExtended._num_replicas_in_sync
        steps: replaced; a step of the user's own sees ranks as replicas
    _DefaultReplicaContext.replica_id_in_sync_group
        steps: replaced; the same
    _DefaultReplicaContext.all_reduce(self, reduce_op, value, options)
        steps: replaced; the same
    StrategyBase.num_replicas_in_sync
        tf_distribute: replaced; 1 for `nn_impl_distribute` in a step of `fit`, others are warned
    ReplicaContextBase.num_replicas_in_sync
        tf_distribute: replaced; the same
tensorflow.python.ops.nn_impl_distribute
    compute_average_loss(per_example_loss, sample_weight, global_batch_size)
        steps: replaced; divides by the examples of all ranks
    scale_regularization_loss(regularization_loss)
        steps: replaced; divides by the number of ranks that have rows
tensorflow.python.distribute.merge_call_interim
    maybe_merge_call(fn, strategy, *args, **kwargs)
        tf_distribute: replaced; an update runs once for all replicas
tensorflow.python.distribute.values
    DistributedVariable
        tf_distribute: gets `__float__` and `__int__`, which other variables have
    DistributedVariable()._distribute_strategy
        steps, verify: read; the strategy of a variable
    DistributedVariable()._distributed_container
        tf_distribute: read; whether a replica's variable is of the strategy
    SyncOnReadVariable
        steps: read; integer states of metrics that replicas add up
tensorflow.python.distribute.sharded_variable
    ShardedVariableMixin
        tf_distribute: read; variables in pieces on parameter servers
tensorflow.python.distribute.collective_all_reduce_strategy
    CollectiveAllReduceStrategy._collective_key_base
        tf_distribute: replaced; other keys for each strategy of a process
    CollectiveAllReduceExtended._initialize_local_devices(self, cluster_resolver, worker_device)
        tf_distribute: replaced; the devices of the plan
tensorflow.python.distribute.coordinator.values
    RemoteValueImpl()._has_fetched_to_local, _status_available_event
        tf_distribute: read; the progress of workers
tensorflow.python.data.ops.iterator_ops
    OwnedIterator.__init__(self, dataset, components, element_spec)
        data: called; an iterator that compares its batches between ranks
    OwnedIterator()._iterator_resource
        data: read; saves the position of a pipeline
tensorflow.python.data.ops.dataset_ops
    DatasetV2._as_serialized_graph
        data: called; whether an interleave keeps an order
    DatasetV2._inputs(self)
        data: called; the stages of a pipeline
    DatasetV2._functions(self)
        data: called; what the functions of a pipeline call
tensorflow.python.data.ops.map_op
    _ParallelMapDataset()._deterministic
        data: read; whether a pipeline keeps an order
tensorflow.python.data.ops.take_op
    _TakeDataset()._count
        data: read; whether its input is read to the end
tensorflow.python.data.ops.shuffle_op
    _ShuffleDataset()._reshuffle_each_iteration
        data: read; whether each iterator has an order of its own
    _ShuffleDataset()._seed, _seed2
        data: read; whether each run has an order of its own
tensorflow.python.ops.script_ops
    _py_funcs
        pipeline: read; the Python functions of a graph
    EagerFunc()._is_grad_func, _support_graph_mode_gradient
        pipeline: read; Python functions that are differentiated
tensorflow.python.ops.clip_ops
    global_norm(t_list, name)
        pipeline, steps: replaced; over all stages, and of gradients summed over ranks
    clip_by_norm(t, clip_norm, axes, name)
        steps: replaced; gradients are clipped by the norm of their sum over ranks
    clip_by_value(t, clip_value_min, clip_value_max, name)
        steps: replaced; refused for gradients that are not summed over ranks
tensorflow.python.ops.gen_random_ops
    random_standard_normal(shape, dtype, seed, seed2, name)
        steps: replaced; ranks draw different numbers for their examples
    random_uniform(shape, dtype, seed, seed2, name)
        steps: replaced; ranks draw different numbers for their examples
    random_uniform_int(shape, minval, maxval, seed, seed2, name)
        steps: replaced; ranks draw different numbers for their examples
    truncated_normal(shape, dtype, seed, seed2, name)
        steps: replaced; ranks draw different numbers for their examples
    random_gamma(shape, alpha, seed, seed2, name)
        steps: replaced; ranks draw different numbers for their examples
    random_poisson_v2(shape, rate, seed, seed2, dtype, name)
        steps: replaced; ranks draw different numbers for their examples
    random_shuffle(value, seed, seed2, name)
        steps: replaced; ranks draw different numbers for their examples
    multinomial(logits, num_samples, seed, seed2, output_dtype, name)
        steps: replaced; ranks draw different numbers for their examples
tensorflow.python.ops.map_fn
    map_fn_v2
        steps: replaced; gradients of single examples are not summed over ranks
tensorflow.python.ops.while_loop
    while_loop_v2
        steps: replaced; likewise
tensorflow.python.ops.parallel_for.control_flow_ops
    vectorized_map
        steps: replaced; likewise
tensorflow.python.ops.random_ops
    random_normal(shape, mean, stddev, dtype, seed, name)
        verify: replaced; draws that do not depend on the batch
    random_uniform(shape, minval, maxval, dtype, seed, name)
        verify: replaced; draws that do not depend on the batch
    truncated_normal(shape, mean, stddev, dtype, seed, name)
        verify: replaced; draws that do not depend on the batch
    categorical(logits, num_samples, dtype, seed, name)
        verify: replaced; draws that do not depend on the batch
    random_shuffle(value, seed, name)
        verify: replaced; draws that do not depend on the batch
tensorflow.python.ops.stateless_random_ops
    stateless_random_normal(shape, seed, mean, stddev, dtype, name, alg)
        verify: replaced; draws that do not depend on the batch
    stateless_random_uniform(shape, seed, minval, maxval, dtype, name, alg)
        verify: replaced; draws that do not depend on the batch
    stateless_truncated_normal(shape, seed, mean, stddev, dtype, name, alg)
        verify: replaced; draws that do not depend on the batch
    stateless_categorical(logits, num_samples, seed, dtype, name)
        verify: replaced; draws that do not depend on the batch
tensorflow.python.ops.stateful_random_ops
    Generator.normal(self, shape, mean, stddev, dtype, name)
        verify: replaced; draws that do not depend on the batch
    Generator.uniform(self, shape, minval, maxval, dtype, name)
        verify: replaced; draws that do not depend on the batch
tensorflow.python.eager.polymorphic_function.polymorphic_function
    UnliftedInitializerVariable
        steps: one operation reads this kind, which is made while a function is traced
    Function.__call__(self)
        steps: replaced; a function that a step calls is traced as a part of it
    Function()._autograph
        steps: read; whether its Python branches are on tensors
    Function()._experimental_autograph_options
        steps: read; how its Python branches are turned into graphs
    Function()._jit_compile
        steps: read; whether it is compiled by itself
    Function()._default_values
        steps: read; binds arguments to its signature
    Function._clone(self, python_function)
        steps: called; a compiled function is traced with the step
tensorflow.python.eager.polymorphic_function.function_type_utils
    canonicalize_function_inputs(args, kwargs, function_type, default_values, is_pure)
        steps: called; arguments become the tensors of its signature
tensorflow.python.eager.polymorphic_function.autograph_util
    py_func_from_autograph(python_func, autograph_options)
        steps: called; turns the Python branches of such a function into a graph
tensorflow.python.autograph.core.ag_ctx
    ControlStatusCtx
        steps: called; has the branches of what such a function calls turned into graphs too
    Status
        steps: read; has the branches of what such a function calls turned into graphs too
tensorflow.python.distribute.ps_values
    AggregatingVariable()._v
        checkpoint: read; the variable that graphs know, of a strategy's
tensorflow.python.framework.auto_control_deps_utils
    get_read_write_resource_inputs(op)
        checkpoint: called; the variables that an update assigns
tensorflow.python.autograph.core.config
    CONVERSION_RULES
        runtime: replaced; functions of this package are called as they are
    DoNotConvert
        runtime: called; functions of this package are called as they are
tensorflow.python.trackable.base
    Trackable()._self_unconditional_checkpoint_dependencies, _self_unconditional_dependency_names
        steps: left out, where a layer's attributes are looked for variables
tensorflow.python.module.module
    Module._flatten
        steps: called; the variables and random generators inside of a layer's attribute
tensorflow.python.ops.resource_variable_ops
    BaseResourceVariable
        steps, verify: its methods that assign are replaced; assignments are noted, or undone
    ResourceVariable
        steps, verify: its methods that assign are replaced; one operation reads this kind
    BaseResourceVariable._strided_slice_assign
        steps, verify: replaced; assignments are noted, or undone
"""

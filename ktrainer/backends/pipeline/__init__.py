"""Pipeline parallelism: a model's graph cut into stages, and the schedules that run them.

What is marked with * is pure: numbers and names in and out, tested without processes.

    start
    backend.py            groups of processes; `prepare` gives a PipelineProgram
    refusals.py           what no pipeline can train
    planning.py           from model and configuration to stages and schedules
    planned.py            the model cut into stages, and this process's part of it
    placing.py            which process holds which variables
    deferred.py           a model built without making its variables

    trace: from a Keras model to its graph
    graph.py              calls the model on symbolic tensors
    recorder.py           records the calls that it makes, and opens layers made of others
    hooks.py              how Keras tells of its calls
    nodes.py              the graph as data
    assemble.py           recorded calls become nodes, numbered and named
    derived.py            tensors that come from variables alone
    python_functions.py   `tf.py_function` inside of a stage
    untraceable.py        why a model cannot be traced, and what to do

    partition: from the graph to stages
    partition.py *        the best cuts within the limits; search.py * finds them
    manual.py             stages by scopes, or by names of layers
    costs.py              what each node costs; flops.py counts operations
    optimizer_memory.py   what an optimizer keeps for each variable
    stages.py *           what a partition comes to, as a table
    cut.py                what each stage computes, receives and sends

    schedule: who does what when
    schedule.py *         schedules by name
    generators.py *       one function for each; eager.py * runs the best of what is ready
    actions.py *          what they consist of
    validate.py *         whether a schedule does all of the work, and ends
    simulate.py *         how long it takes; grid.py * shows it as text

    run: one update
    program.py            train, test and predict
    runner.py             this process's part of a schedule
    microbatches.py       a batch cut up, each part with its weight
    compiled.py           the compiled stages, for each shape of microbatch
    stage.py              one of them: forward, backward, and backward in halves
    parts.py              a traced stage as functions; split.py takes graphs apart
    arguments.py          what a stage is compiled with
    turns.py              one large gradient at a time
    head.py               loss and metrics, on the last stage; global_loss.py: of a whole batch

    between processes
    transfers.py *        what crosses, and in which order
    post.py               tensors from stage to stage; wire.py: from and into which memory

    update
    update.py             gradients over replicas, clipped and applied
    sums.py               gradients added up over microbatches
    shared.py             gradients of weights that several stages hold
"""

"""A Keras model traced into its graph of layers and ops.

trace.py                         the entry: from a model to a `Graph`
call_hooks.py, call_recorder.py  the calls that a model makes on symbolic tensors
build_graph.py                   from recorded calls to the graph; nodes.py: the graph as data
derived_tensors.py               tensors that are computed from variables alone
stage_scopes.py                  `with partition(i):`
untraceable.py                   the error of a model that cannot be traced
"""

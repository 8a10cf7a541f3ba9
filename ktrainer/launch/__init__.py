"""Start, watch and end a group of processes; say what is installed; build Horovod.

    ktrainer run -n 2 script.py key=value
    │  checks the configuration, makes a private folder of pipes        launch.py
    ├─ mpirun (flags: command.py; listening on loopback: network.py)
    │  ├─ rank 0: python -m ktrainer.launch.worker FOLDER script.py …   worker.py
    │  └─ rank 1: …       output and errors come back through the pipes channel.py
    ├─ merges output by rank, waits, passes signals on                  watch.py, output.py
    ├─ sees whether all come to `Trainer(...)`                          start.py
    ├─ sees whose death the others do not go on after (--heal)          parts.py
    ├─ ends whatever is left, and says who failed first                 processes.py, report.py
    └─ the last words and the exit code, or another start       end.py, ending.py, restarts.py

Clusters of parameter servers are started by cluster.py in the place of mpirun; healing.py has
`--heal` and its like. folders.py takes away what a launch has made, and kernel.py whom it has left.
`ktrainer env` is env.py; `ktrainer plan`, which runs a script in this process up to its first
`fit`, is plan.py; `ktrainer verify`, which launches a script twice, is verify.py;
`ktrainer horovod build` is horovod_build.py, by horovod_recipe.py.

Nothing here imports TensorFlow in the launching process.
"""

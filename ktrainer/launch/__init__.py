"""Start, watch and end a group of processes. Nothing here imports TensorFlow in the launcher.

    ktrainer run -n 2 script.py key=value          (cli/run_command.py)
    │  makes a private folder of pipes                        launch_folders, rank_channel
    ├─ mpirun (on loopback, if asked)                         mpirun_command, mpirun_network
    │  ├─ rank 0: runs the script                             rank_process
    │  └─ rank 1: ...
    ├─ process that the ranks of a restart are forks of       warm_process, rank_stub
    ├─ merges output by rank, waits, forwards signals         rank_group, rank_output
    ├─ records which ranks start, are lost or fail            group_state
    ├─ kills the remaining processes                          process_tree
    └─ prints the first failure; exits or restarts            failure_report, exit_report, restarts

Over several hosts: `hosts` names them, `host_check` asks them by the program `host_probe`,
`host_differences` compares the answers, `host_connections` is connected with a `host_relay` on
each, which carries the ranks' pipes (its end of the connection: `launcher_connection`). mpirun
starts the ranks there too; where they heal, the relays do, and mpirun starts stubs of them
(`rank_stub`, `rank_stubs`).

`parameter_server_cluster` starts a cluster with parameter servers, instead of mpirun;
`data_service_group` and `data_service_process` run a tf.data service; `cluster_job` describes a run
for Slurm and other schedulers;
`heal_option` holds the options of `--heal`; `orphan_prevention` keeps processes from outliving
their parent; `horovod_recipe` is for `ktrainer horovod build`.
"""

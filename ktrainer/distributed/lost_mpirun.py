"""Keep a rank alive when mpirun is lost, with its host for example.

Open MPI aborts a process that has lost the connection to mpirun. A handler of that event, which
PMIx calls before Open MPI's own, says that all has been done. Messages between the surviving ranks
do not pass mpirun; the relay of their host lets them save a checkpoint, and ends them.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

_LOST_CONNECTION = -61  # PMIX_ERR_LOST_CONNECTION
_ACTION_COMPLETE = -334  # PMIX_EVENT_ACTION_COMPLETE
_LIBRARY = "libpmix.so.2"

# pmix_event_notification_cbfunc_fn_t and pmix_notification_fn_t of pmix_common.h.
_Done = ctypes.CFUNCTYPE(
    *(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
)
_Handler = ctypes.CFUNCTYPE(
    *(None, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p),
)


def outlive_mpirun() -> bool:
    """Keep this process from being aborted when mpirun is lost.

    Returns:
        Whether that is possible: MPI has been started, with the PMIx library of Open MPI 5.
    """
    try:  # MPI has loaded it
        register = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD).PMIx_Register_event_handler
    except (OSError, AttributeError):
        return False
    codes, nothing = (ctypes.c_int * 1)(_LOST_CONNECTION), ctypes.c_size_t(0)
    return bool(register(codes, ctypes.c_size_t(1), None, nothing, _handle, None, None) >= 0)


def _on_lost(*event: Any) -> None:
    done, data = event[-2:]
    if done:
        _Done(done)(_ACTION_COMPLETE, None, 0, None, None, data)


_handle = _Handler(_on_lost)  # kept: PMIx calls it at any time

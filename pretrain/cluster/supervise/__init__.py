"""Supervisor (launch/supervise.py): restarts a run after a crash, a hang or a signal, and logs every start.

Imports cluster/hosts, cluster/launcher_flags, checkpoint, config, distributed, monitor and errors; never health/ or the
launch modules.
"""

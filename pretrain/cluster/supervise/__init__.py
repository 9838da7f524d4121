"""Supervisor (launch/supervise.py): restarts a run after a crash, a hang or a signal, and logs every start.

Imports cluster/hosts, cluster/launcher_flags and the layers below cluster/; never health/ or the launch modules.
"""

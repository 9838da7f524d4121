"""Supervisor (`ds-pretrain supervise`): it restarts a run that crashed or was stopped, and logs every start."""

"""This host's network interfaces, and the variables by which launchers number ranks.

Imports only the standard library and psutil, because cluster/hosts/remote.py sends this file's text to other hosts.
"""

import socket

# (rank, world size, local rank, local world size) as each launcher names them, in order of precedence
LAUNCHER_VARIABLES = {
    "torch": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "pmi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
RANK_VARIABLES = tuple(names[0] for names in LAUNCHER_VARIABLES.values())


def interface_towards(address: str) -> tuple[str, str] | None:
    """Return (name, address) of the network interface that reaches or owns `address`.

    Return None for the loopback interface, and if `address` cannot be resolved or reached.
    """
    import psutil

    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # a datagram socket: this sends nothing
            source = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if source in [entry.address.split("%")[0] for entry in addresses] and name != "lo":
            return name, source
    return None

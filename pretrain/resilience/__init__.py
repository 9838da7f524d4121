"""What keeps a run healthy: stop requests, the guard against bad steps, the watchdog, the replica check, the run lock.

Imports checkpoint/, engine/, config/, monitor/, distributed/ and errors; never cluster/.
"""

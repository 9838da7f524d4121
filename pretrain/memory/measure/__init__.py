"""Memory that real engines hold and need: inventory of an engine, trackers, and short runs on this machine.

Imports memory/step_time/, memory/estimate/, engine/ and everything below; never memory/search/ or memory/report/.
"""

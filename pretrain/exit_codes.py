"""How a run ends, as every launcher, scheduler and supervisor is told."""

FINISHED = 0
CRASHED = 1  # the last checkpoint was not written either; and whatever else is not named here
REFUSED = 2  # bad input: another start would end the same
STOPPED = 75  # saved on a signal or at a time limit, start me again (EX_TEMPFAIL of sysexits.h)
GUARD = 76  # stopped by the bad-step guard
HANG = 77
INTERRUPTED = 130  # by Ctrl-C, without a save: what a shell reports of a program that SIGINT ended

NEVER_AGAIN = {REFUSED: "the run was refused", GUARD: "the bad-step guard stopped it"}

"""Stand-alone scripts, one for each defect of DeepSpeed: `LETTER_name.py`. `reproduce.py` runs them.

A script needs DeepSpeed and torch alone, and runs on CPUs. Its last line says what is expected and what was found. Exit
code 0: correct; 1: the defect exists; 77: the script cannot run here, or this version lacks the feature.
"""

"""tools/check_cluster.py: every host measures itself and its links; one verdict names those that stand out."""

"""Several hosts: which ones, whether they are fit for one run, what their ranks need, and one end for all of them."""

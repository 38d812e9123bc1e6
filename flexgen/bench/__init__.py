"""Speed and memory of full-size engines with random weights: shapes, workloads, the bound, results and their page."""

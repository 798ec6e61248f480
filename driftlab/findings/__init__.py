"""What the probes' numbers mean, a file a question: evidence in words, and the place where there is one."""

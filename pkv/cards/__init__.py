"""What is known of GPUs: profiles in files, what work costs there, and a simulator that plays plans."""

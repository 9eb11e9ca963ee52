"""`pipeload bench`: streaming beside what the machine allows."""

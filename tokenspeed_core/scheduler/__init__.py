"""The scheduler: sequence states, running sequences as columns, the policy, and step plans."""

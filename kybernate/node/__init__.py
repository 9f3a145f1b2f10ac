"""What the services of one GPU node share: remembered GPUs, wishes, seat owners, the choice of the configuration."""

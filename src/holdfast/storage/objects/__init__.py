"""Object stores: S3 and its like, Google Cloud Storage, Azure."""

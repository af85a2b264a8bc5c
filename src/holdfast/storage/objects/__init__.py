"""Object stores: S3 and compatible ones, Google Cloud Storage, Azure."""

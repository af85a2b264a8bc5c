"""What `make release` does: build, check the archives, try the wheel in bare environments, tag."""

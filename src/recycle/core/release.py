"""The release: what plans and libraries on disk were made by."""

RELEASE = "0.1.0"

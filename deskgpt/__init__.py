"""The ground that the scripts stand on: one owner a file. Importing any of them does nothing."""

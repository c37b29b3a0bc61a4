"""Side-by-side runs against other libraries, and how time and memory grow; not part of the package."""

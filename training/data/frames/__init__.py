"""Frames as arrays: from pictures, video files and LMDB databases, and written as pictures or a
video."""

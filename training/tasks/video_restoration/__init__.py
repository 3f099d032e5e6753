"""Video restoration (deblurring, super-resolution): frames in, frames out, trained on paired
folders of frames."""

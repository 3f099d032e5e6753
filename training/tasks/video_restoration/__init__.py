"""Video restoration: frames in, frames out (deblurring, super-resolution), trained on paired
folders of frames."""

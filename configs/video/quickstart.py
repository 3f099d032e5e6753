"""Video deblurring in about a minute on two CPU cores. Create the data first:
python examples/make_blur_video.py"""

task = "video_restoration"
device = "auto"  # two GPUs if available, else two CPU ranks
device_batch_size = 2
num_iterations = 400
eval_every = 100
save_every = 200
precision = "fp32"

dataroot_gt = "data/blur_video/train"
test_dataroot_gt = "data/blur_video/test"
num_frame = 5
gt_size = 48
embed_dim = 16
num_blocks = 2
G_optimizer_lr = 2e-3
G_charbonnier_eps = 1e-3

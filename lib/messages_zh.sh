# shellcheck shell=bash
# The Chinese messages of lib/*.sh: ID → format for printf.

# shellcheck disable=SC2034 # read in lib/messages.sh
declare -gA MESSAGES_ZH=(
  ["answer.no_folder"]='文件夹 %s 已消失；没有启动任何内容'
  ["answer.unwritten"]='无法写入标准输出：%s'
  ["batch.frozen"]='%s 是某个作业的冻结代码，只能在作业中运行（建议：在项目中运行 ./submit_job.sh --resume=…）'
  ["batch.no_environment"]='节点 %s 上没有这个作业的环境：%s（退出码 %d）'
  ["environment.closed"]='当前用户（%s）无法使用环境 .venv 的 Python：没有 %s 的权限（建议：chmod a+x %s；制作镜像时：UV_PYTHON_INSTALL_DIR=/opt/python）'
  ["environment.creating"]='正在用 %s 创建环境 .venv（仅此一次）'
  ["environment.not_created"]='无法创建环境 .venv'
  ["environment.recreating"]='正在用 %s 重新创建环境 .venv：原环境已损坏，或来自另一个 requirements.lock（仅此一次）'
  ["limit.files"]='此 shell 最多可打开 %d 个文件（ulimit -n），至少需要 %d 个（建议：%s）'
  ["python.active_lacks"]='已激活的环境 %s 有 torch，但缺少必需的包：%s'
  ["python.active_unused"]='不使用已激活的环境 %s：%s'
  ["python.broken_or_old"]='它的 Python 无法运行或版本太旧'
  ["python.installed_lacks"]='已安装的 Duet 的环境（%s）缺少：%s'
  ["python.missing"]='PATH 中没有 Python 3.10 或更新版本（建议：apt-get install python3 python3-venv；没有 root 权限时：先安装 uv，再运行 uv python install 3.13）'
  ["python.other_torch"]='不使用已激活的环境 %s（torch %s），而使用 .venv（torch %s）：%s'
  ["python.too_new"]='创建 .venv 需要 PATH 中有 Python 3.10 至 3.%d，找到的是 %s（建议：apt-get install python3.13 python3.13-venv；没有 root 权限时：先安装 uv，再运行 uv python install 3.13）'
  ["slurm.no_job"]='sbatch 没有提交作业，见上方它的输出'
  ["slurm.refused"]='sbatch 拒绝了这个作业，原因见上方它的输出；没有提交任何作业（退出码 %d）'
  ["torch_local.unusable"]="TORCH_LOCAL_PATH 为 '%s'（环境变量）：%s"
  ["torch_local.used"]='使用 TORCH_LOCAL_PATH=%s 中的 PyTorch（PYTHONPATH、LD_LIBRARY_PATH）'
)

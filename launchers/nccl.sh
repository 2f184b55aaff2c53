# Settings of NCCL for usual networks between GPU machines. Uncomment the lines of yours in a copy, and source the copy
# before the agents start: AREAL_JAX_SETUP='source /shared/nccl.sh' for Slurm, SETUP for Google Cloud.
# Unset, NCCL finds InfiniBand and RoCE by itself, and else uses TCP. None of these lines was measured with areal-jax.
# All variables: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
# shellcheck shell=bash

# --- to see which network is used: "NET/IB", "NET/Socket" or a plugin's name in the trainer's log
# export NCCL_DEBUG=INFO

# --- machines with several interfaces: the one by which they reach each other (for NCCL's own TCP connections)
# export NCCL_SOCKET_IFNAME=eth0

# --- InfiniBand: all adapters with names that begin with mlx5, without Ethernet ports of such names
# export NCCL_IB_HCA=mlx5

# --- RoCE: as InfiniBand, with RoCE v2 over IPv4; which index that is: show_gids (3 on most ConnectX machines)
# export NCCL_IB_HCA=mlx5
# export NCCL_IB_GID_INDEX=3

# --- AWS with EFA (p4d, p5): needs the libraries of EFA and of its plugin aws-ofi-nccl on LD_LIBRARY_PATH
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html
# export FI_PROVIDER=efa

# --- Google Cloud a3-highgpu with GPUDirect-TCPX: needs four more network interfaces, and the receive manager with its
# libraries in /usr/local/tcpx; with one interface NCCL uses TCP over eth0, as without these lines.
# https://cloud.google.com/kubernetes-engine/docs/how-to/gpu-bandwidth-gpudirect-tcpx-autopilot#environment-variables-nccl
# export LD_LIBRARY_PATH=/usr/local/tcpx/lib64:${LD_LIBRARY_PATH:-}
# export NCCL_SOCKET_IFNAME=eth0
# export NCCL_GPUDIRECTTCPX_CTRL_DEV=eth0
# export NCCL_GPUDIRECTTCPX_SOCKET_IFNAME=eth1,eth2,eth3,eth4
# export NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX=/run/tcpx
# export NCCL_GPUDIRECTTCPX_TX_BINDINGS="eth1:8-21,112-125;eth2:8-21,112-125;eth3:60-73,164-177;eth4:60-73,164-177"
# export NCCL_GPUDIRECTTCPX_RX_BINDINGS="eth1:22-35,126-139;eth2:22-35,126-139;eth3:74-87,178-191;eth4:74-87,178-191"
# export NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS=50000
# export NCCL_CROSS_NIC=0 NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_NET_GDR_LEVEL=PIX NCCL_P2P_PXN_LEVEL=0
# export NCCL_NSOCKS_PERTHREAD=4 NCCL_SOCKET_NTHREADS=1 NCCL_DYNAMIC_CHUNK_SIZE=524288 NCCL_BUFFSIZE=4194304
# export NCCL_P2P_NET_CHUNKSIZE=524288 NCCL_P2P_PCI_CHUNKSIZE=524288 NCCL_P2P_NVL_CHUNKSIZE=1048576

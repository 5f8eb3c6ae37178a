export VLLM_USE_V1=1
model=Qwen/Qwen3-8B
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_files=data/gsm8k/train.parquet \
    data.val_files=data/gsm8k/test.parquet \
    data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=2048 \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    critic.model.path="$model" \
    critic.optim.lr=1e-5 \
    critic.ppo_max_token_len_per_gpu=24576 \
    critic.fsdp.param_offload=True \
    critic.fsdp.optimizer_offload=True \
    trainer.logger=console \
    trainer.experiment_name="qwen3_8b_ppo_${RUN_NUMBER}" \
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_epochs=15
